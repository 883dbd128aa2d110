"""WHAT is kept where: layouts, rows, rules, policies and the check that refuses what cannot be."""
