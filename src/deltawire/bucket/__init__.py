"""A run as it lies in a bucket: reading it, fetching from it, replaying it. Shared by trainer, replica and tools."""
