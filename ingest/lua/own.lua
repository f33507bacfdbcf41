-- What was delivered to an engine and is not ended: some of it. A field that is longer than any body may be is cut: whole, it
-- might take longer than an engine waits for a reply, and nothing after it would ever be read.
-- KEYS 1 input stream
-- ARGV 1 group, 2 owner, 3 where to begin, as in XPENDING, 4 entries at most, 5 bytes of a field at most
-- Replies {{entry, {fields}}, ...}; one that was deleted has no fields
-- include entries
local BYTES = 4194304 -- no further entry once there are so many
local found, size = {}, 0
for _, item in ipairs(ask('XPENDING', KEYS[1], ARGV[1], ARGV[3], '+', ARGV[4], ARGV[2])) do
  local there = redis.call('XRANGE', KEYS[1], item[1], item[1])[1]
  local fields = there and there[2] or {}
  for i = 1, #fields do
    fields[i] = string.sub(fields[i], 1, tonumber(ARGV[5]))
    size = size + #fields[i]
  end
  found[#found + 1] = {item[1], fields}
  if size >= BYTES then break end
end
return found
