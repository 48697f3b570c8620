"""A process and its machine: start and end, logging, ports, cores, memory that processes share."""
