"""Problem sets."""
