"""What measures, replays and plans: benchmarks, simulator, studies and planner. The product imports none of it."""
