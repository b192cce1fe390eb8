"""Multi-Agent Group Relative Policy Optimization (arXiv 2508.04652)."""

__version__ = "0.1.0"
