"""Why is acceptance what it is: does the pair fit, what is to be expected of it, what is served, and what is wrong."""
