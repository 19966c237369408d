// A chat request as curl and as Python.

function quoteForShell(text: string): string {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

export function asCurl(origin: string, body: object): string {
  return [
    `curl -N ${origin}/v1/chat/completions`,
    `  -H "Authorization: Bearer $THAW_API_KEY"`,
    `  -H 'Content-Type: application/json'`,
    `  -d ${quoteForShell(JSON.stringify(body))}`,
  ].join(" \\\n");
}

/** JSON strings and numbers are Python literals too; the request has no true, false or null but `stream`. */
export function asPython(origin: string, body: { model: string; messages: object[]; max_tokens: number }): string {
  return [
    "import os",
    "import openai",
    "",
    `client = openai.OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key=os.environ.get("THAW_API_KEY", "none"))`,
    "stream = client.chat.completions.create(",
    `    model=${JSON.stringify(body.model)},`,
    `    messages=${JSON.stringify(body.messages)},`,
    `    max_tokens=${body.max_tokens},`,
    "    stream=True,",
    ")",
    "for chunk in stream:",
    `    print(chunk.choices[0].delta.content or "", end="", flush=True)`,
  ].join("\n");
}
