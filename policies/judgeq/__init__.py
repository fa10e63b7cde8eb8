"""JudgeQ (arXiv:2509.10798): the policy, its soft tokens and their trainer."""
