"""Which tile configurations an engine finds for its GPU."""
