-- Says what an image URL was found to hold, or gives the claim to find that out.
-- KEYS: record, mark that it is fresh, claim. ARGV: claim, its time to live (ms), 1 to ask for it beside a fresh record.
-- Returns {{record, 1 if it is fresh, 1 if the claim was given}}.
local record, fresh = get(KEYS[1]), redis.call('EXISTS', KEYS[2])
local claimed = 0
if record == '' or fresh == 0 or ARGV[3] == '1' then
  claimed = redis.call('SET', KEYS[3], ARGV[1], 'NX', 'PX', ARGV[2]) and 1 or 0
end
return { { record, fresh, claimed } }
