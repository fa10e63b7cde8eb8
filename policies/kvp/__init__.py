"""KVP (arXiv:2602.10238): the policy, its scorer, its training objectives and its trainer."""
