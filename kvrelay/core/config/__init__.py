"""Settings of a process: from flags, environment and file to one typed object."""
