"""Sampling from models in this process: decoding, its steps, drawing tokens, agents side by side."""
