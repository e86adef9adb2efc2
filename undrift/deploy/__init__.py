"""Real federations: the simulator's rounds with clients on other machines, over Flower."""
