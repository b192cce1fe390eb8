"""Examples that run: each module is one page to read and to copy from."""
