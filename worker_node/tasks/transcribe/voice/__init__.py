"""Voice activity: where in a recording somebody speaks, so that silence is not given to the speech model."""
