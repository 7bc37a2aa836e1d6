"""The limits of chat requests and of what is read from replies, each with its reason."""

MAX_TOOLS = 128  # OpenAI's own limit of `functions`
MAX_TOOLS_CHARS = 1 << 18  # of all tools as JSON: more than any model's context holds, and a template writes them in milliseconds
MAX_MESSAGES = 1 << 14  # one per eight tokens of the longest contexts; each costs a turn of the template's loop
MAX_PARTS = 1 << 10  # of one message's content
MAX_CALLS = 128  # tool calls of one message, in requests and in replies: one per tool
MAX_DEPTH = 64  # of JSON in requests and replies; the walk over it and templates recurse, and Python's own limit is 1,000
MAX_NODES = 1 << 16  # values in one JSON value of a request, which bounds the walk over it
MAX_DIGITS = 1000  # of an integer; Python refuses to write more than 4,300
MAX_TEMPLATE_KWARGS = 32  # no template known to us reads more than ten
MAX_KWARG_CHARS = 4096  # of a string in `chat_template_kwargs`, which templates may write several times
MAX_NAME = 64  # characters of a function's name, as OpenAI has it
MAX_WORD = 6 * MAX_NAME + 2  # characters of a name or key as JSON, each written as \uXXXX, and the quotes
MAX_HELD = 1 << 18  # characters of a call that are held before it is known to be one, or of one value that is held to be converted
MAX_LEAD = 64  # characters of white space that are held because they may only separate calls
