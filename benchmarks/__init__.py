"""Measurements that anyone can repeat: each prints ratios of figures taken in turn within one run."""
