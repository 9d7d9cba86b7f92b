"""What timing, evaluation and tuning share: methods with their settings, parsing, facts about the machine."""
