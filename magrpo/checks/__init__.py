"""Calls of plug-ins that check the result at once, so that a mistake is reported where it was made."""
