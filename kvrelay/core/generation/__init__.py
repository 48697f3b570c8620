"""What a request asks for, and what a sequence produces."""
