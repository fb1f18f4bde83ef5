"""Files of prompts with recorded answers for loads that recordings lack."""
