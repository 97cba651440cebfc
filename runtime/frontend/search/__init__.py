"""Tree search over branches: best-of-n, beams, trees of thoughts, Monte Carlo tree search."""
