"""Engines of encoders, whatever their task: rows of token ids in, one vector for each row out, in batches."""
