"""The tools that come with the engine. They enter through the door that is everybody's."""
