"""What operators see: logs, Prometheus metrics, traces, rolling statistics, the feed of the dashboard."""
