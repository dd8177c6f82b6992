"""The keeper: a replica without an engine that writes back what helps readers."""
