"""Model families and their loader."""
