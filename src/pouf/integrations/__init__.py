"""Doors to other tools. Each needs an extra, is imported when asked for, and names the extra where it is missing."""
