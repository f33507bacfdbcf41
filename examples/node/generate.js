// `node generate.js [REDIS_URL] [PROMPT]`: sends a prompt and prints the text as it comes, then how it ended.

import { Queue } from './queue.js';

const [url, prompt = 'The capital of France is'] = process.argv.slice(2);
const queue = new Queue(url);

try {
  const id = await queue.submit({ prompt, max_tokens: 16, temperature: 0 });
  for await (const event of queue.events(id)) {
    if (event.type === 'delta') process.stdout.write(event.text);
    if (event.type === 'done') {
      console.log(`\n${event.state}: ${JSON.stringify(event.error ?? event.usage)}`);
      process.exitCode = event.state === 'completed' ? 0 : 1;
    }
  }
} finally {
  queue.close();
}
