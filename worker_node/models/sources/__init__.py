"""Where models come from: what a name stands for, what a source holds, and how its files get here."""
