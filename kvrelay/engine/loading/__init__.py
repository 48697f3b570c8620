"""Loading: from the files of a checkpoint to a model in memory."""
