"""Q-Filters (arXiv:2503.02812): the policy and its calibration."""
