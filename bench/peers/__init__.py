"""The servers that bench.compare plays to: how each is installed, started and spoken to."""
