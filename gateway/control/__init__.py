"""The slow path: probes, the admin listener, reload. It meets the data path only in snapshots."""
