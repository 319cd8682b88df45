"""What operators see: logs, metrics, traces, rolling statistics, the dashboard's feed."""
