"""Other ways to generate, behind one small interface (`generation`)."""
