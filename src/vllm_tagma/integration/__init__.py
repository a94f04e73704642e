"""Everything that touches vLLM by patch, subclass or swap. ``seams/`` lists each with its why."""
