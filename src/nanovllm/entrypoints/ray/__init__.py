"""Replicas of an engine on Ray: a class for `map_batches` of Ray Data, a resumable run over files, and an application for Ray Serve."""
