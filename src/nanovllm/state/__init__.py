"""The values that change: each call takes the old one and returns the new one."""
