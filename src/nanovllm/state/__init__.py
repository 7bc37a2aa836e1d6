"""The values that change: each call takes the old value and returns a new one."""
