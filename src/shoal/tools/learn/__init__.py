"""Learn: lessons that ask for a prediction, run the experiment, and check both."""
