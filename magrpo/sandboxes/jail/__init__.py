"""The half of the sandbox that runs inside the jail. Standard library only, and nothing of this project outside it."""
