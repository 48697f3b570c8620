"""The cluster's nodes as the router sees them: who lives, how busy they are, what they hold."""
