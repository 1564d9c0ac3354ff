"""How replicas agree: the world, gradient exchange, the step's shared figures. Imports torch."""
