"""What a system is asked (workloads, traces), how it is asked (replay), and what is made of the answers (report)."""
