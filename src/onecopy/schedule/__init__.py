"""WHEN things move: ops per unit and event, and the folds over them that predict memory and traffic."""
