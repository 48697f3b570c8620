"""The cluster's nodes as the router sees them: which are live, how busy they are, what they hold."""
