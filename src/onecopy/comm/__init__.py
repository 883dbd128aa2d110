"""How a tensor goes from one placement to another: process groups and the edges that run over them."""
