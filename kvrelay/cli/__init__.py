"""The command line: a thin dispatch, the client commands, and the supervisor behind `kvrelay serve`."""
