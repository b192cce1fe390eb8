"""Example programs whose agents ``magrpo`` trains (docs/programs.md). Each is a whole program; begin with ``coop``."""
