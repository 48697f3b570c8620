"""Steps on a CPU: the runner, and the threads that it computes with."""
