"""Knowing your traffic: what a trace says about reuse, and what it would do to a node. Pure but for the plots."""
