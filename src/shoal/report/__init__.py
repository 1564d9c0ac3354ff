"""What a run folder says: summary, replicas, plots, page. Reads only the run folder."""
