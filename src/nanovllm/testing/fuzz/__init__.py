"""Run state machines for a given time, and write what fails as a story of calls and as a test."""
